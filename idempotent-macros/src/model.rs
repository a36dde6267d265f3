//! The flow as the later stages see it: phases with their arrows and what they take, and the fns that
//! follow a rejection. Nothing in here is checked yet; that is [`validate`](crate::validate).

use proc_macro2::{Ident, Span};

use crate::attr::{self, Arrow, FlowOptions, MarkKind, PhaseOptions};
use crate::errors::Errors;
use crate::graph::{Arrows, STARTED};
use crate::parse::{Block, Marked};
use crate::signature::{self, Signature, Ty};
use crate::text::plain;

/// A flow.
#[derive(Debug, PartialEq)]
pub(crate) struct Flow {
    pub(crate) ident: Ident,
    pub(crate) options: FlowOptions,
    pub(crate) phases: Vec<Phase>,
    pub(crate) handlers: Vec<Handler>,
    /// Some arrow could not be read, so that gaps in the graph say nothing.
    pub(crate) incomplete: bool,
}

/// A phase: the async fn on an arrow.
#[derive(Debug, PartialEq)]
pub(crate) struct Phase {
    pub(crate) name: Ident,
    pub(crate) kind: MarkKind,
    pub(crate) arrow: Arrow,
    pub(crate) options: PhaseOptions,
    pub(crate) signature: Signature,
}

/// An `on_reject` fn.
#[derive(Debug, PartialEq)]
pub(crate) struct Handler {
    pub(crate) name: Ident,
    pub(crate) at: Vec<Ident>,
    pub(crate) with: Vec<Ident>,
    pub(crate) signature: Signature,
}

/// Puts the flow together from what was read.
pub(crate) fn flow(block: &Block, options: FlowOptions, errors: &mut Errors) -> Flow {
    let mut flow = Flow {
        ident: block.ident.clone(),
        options,
        phases: Vec::new(),
        handlers: Vec::new(),
        incomplete: block.incomplete,
    };
    for marked in &block.marked {
        flow.add(marked, errors);
    }
    flow
}

impl Flow {
    fn add(&mut self, marked: &Marked, errors: &mut Errors) {
        let name = &marked.signature.ident;
        if let Some(cfg) = marked.cfg {
            let message = format!(
                "`{name}` is part of the flow in every build: with `#[cfg]`, stored flows could stand at a point that a build does not have; put it on the impl block or into the body"
            );
            errors.at(cfg, message);
        }
        let mut marks = marked.marks.iter();
        let Some((mark, kind)) = marks
            .next()
            .and_then(|mark| Some((mark, MarkKind::named(&mark.name)?)))
        else {
            return;
        };
        for second in marks {
            errors.on(
                &second.name,
                format!(
                    "`{name}` has a mark already, `#[{}(..)]`; a fn is one phase",
                    mark.name
                ),
            );
        }
        let arguments = mark.arguments.clone();
        if kind == MarkKind::OnReject {
            let (at, options) = attr::on_reject(&mark.name, arguments, errors);
            let signature = signature::read(kind, &marked.signature, errors);
            self.handlers.push(Handler {
                name: name.clone(),
                at,
                with: options.with,
                signature,
            });
            return;
        }
        let (arrow, options) = attr::phase(kind, &mark.name, arguments, errors);
        let signature = signature::read(kind, &marked.signature, errors);
        match arrow {
            Some(arrow) => self.phases.push(Phase {
                name: name.clone(),
                kind,
                arrow,
                options,
                signature,
            }),
            None => self.incomplete = true,
        }
    }

    pub(crate) fn arrows(&self) -> Arrows {
        Arrows(
            self.phases
                .iter()
                .map(|phase| phase.arrow.clone())
                .collect(),
        )
    }

    /// All points in the order of the flow, `Started` first and `Finished` last.
    pub(crate) fn points(&self) -> Vec<Ident> {
        let end = |name| Ident::new(name, Span::call_site());
        let between = self.arrows().points();
        [end(STARTED)]
            .into_iter()
            .chain(between)
            .chain([end(crate::graph::FINISHED)])
            .collect()
    }

    /// The type of the value that is stored at a point: that which its takers take. None if nobody
    /// takes it; then it may be any.
    pub(crate) fn payload(&self, point: &Ident) -> Option<&Ty> {
        let leaving = self
            .phases
            .iter()
            .filter(|phase| phase.arrow.from == *point)
            .find_map(|phase| phase.value());
        let rejecting = || {
            self.handlers
                .iter()
                .filter(|handler| handler.at.contains(point))
                .find_map(Handler::value)
        };
        let asking = || {
            self.asked()
                .find(|(_, asked, _)| *asked == point)
                .map(|(_, _, ty)| ty)
        };
        leaving.or_else(rejecting).or_else(asking)
    }

    /// Everything that is asked for by `with(..)`: where, which point's value, and as which type.
    fn asked(&self) -> impl Iterator<Item = (&Ident, &Ident, &Ty)> {
        let phases = self.phases.iter().flat_map(|phase| {
            phase
                .with()
                .map(move |(point, ty)| (&phase.arrow.from, point, ty))
        });
        let handlers = self.handlers.iter().flat_map(|handler| {
            handler
                .at
                .iter()
                .flat_map(move |at| handler.with().map(move |(point, ty)| (at, point, ty)))
        });
        phases.chain(handlers)
    }

    /// Whether some phase or `on_reject` fn takes the value of `point` at `at` or ahead of it.
    pub(crate) fn is_taken_from(&self, at: &Ident, point: &Ident) -> bool {
        let arrows = self.arrows();
        let ahead = |taker: &Ident| arrows.leads(&at.to_string(), &taker.to_string());
        let leaving = self
            .phases
            .iter()
            .any(|phase| phase.arrow.from == *point && phase.value().is_some());
        let rejecting = self
            .handlers
            .iter()
            .any(|handler| handler.at.contains(point) && handler.value().is_some());
        ((leaving || rejecting) && ahead(point))
            || self
                .asked()
                .any(|(taker, asked, _)| asked == point && ahead(taker))
    }

    /// The points whose values are stored while the flow stands at `at`.
    pub(crate) fn keeps(&self, at: &Ident) -> Vec<Ident> {
        let arrows = self.arrows();
        let is_behind = |point: &Ident| arrows.leads(&point.to_string(), &at.to_string());
        let between = arrows.points();
        if !between.contains(at) {
            return Vec::new();
        }
        between
            .into_iter()
            .filter(|point| point == at || (is_behind(point) && self.is_taken_from(at, point)))
            .collect()
    }

    /// The type of the request: that of the phase which leaves `Started`, or else of any fn.
    pub(crate) fn request(&self) -> Option<&Ty> {
        let first = self
            .phases
            .iter()
            .filter(|phase| phase.arrow.from == STARTED);
        let all = self
            .phases
            .iter()
            .map(|phase| &phase.signature)
            .chain(self.handlers.iter().map(|handler| &handler.signature));
        first
            .map(|phase| &phase.signature)
            .chain(all)
            .find_map(|signature| signature.request.as_ref())
    }
}

impl Phase {
    /// The value of the point it leaves, if it takes it.
    pub(crate) fn value(&self) -> Option<&Ty> {
        leading_value(&self.signature, &self.options.with)
    }

    /// The values it asks for by `with(..)`.
    pub(crate) fn with(&self) -> impl Iterator<Item = (&Ident, &Ty)> {
        self.options.with.iter().zip(
            self.signature
                .values
                .iter()
                .skip(usize::from(self.value().is_some())),
        )
    }

    /// The name of the outside call, from which its key is derived.
    pub(crate) fn call_name(&self) -> String {
        self.options
            .key
            .as_ref()
            .map_or_else(|| plain(&self.name), |key| key.value.clone())
    }

    pub(crate) fn has_branches(&self) -> bool {
        self.arrow.to.len() > 1
    }
}

impl Handler {
    /// The value of the point at which it is called, if it takes it.
    pub(crate) fn value(&self) -> Option<&Ty> {
        leading_value(&self.signature, &self.with)
    }

    /// The values it asks for by `with(..)`.
    pub(crate) fn with(&self) -> impl Iterator<Item = (&Ident, &Ty)> {
        self.with.iter().zip(
            self.signature
                .values
                .iter()
                .skip(usize::from(self.value().is_some())),
        )
    }
}

/// There is one value more than `with(..)` asks for: the first is that of the point itself.
fn leading_value<'a>(signature: &'a Signature, with: &[Ident]) -> Option<&'a Ty> {
    signature
        .values
        .first()
        .filter(|_| signature.values.len() > with.len())
}
