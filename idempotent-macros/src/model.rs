//! The flow as the later stages see it: phases with their arrows and what they take, the fns that
//! follow a rejection, and those that ask what became of a call. Nothing in here is checked yet; that is [`validate`](crate::validate).

use proc_macro2::{Ident, Span};

use crate::attr::FlowOptions;
use crate::errors::Errors;
use crate::graph::{Arrows, FINISHED, STARTED};
use crate::marks::{self, Arrow, MarkKind};
use crate::parse::{Block, Marked};
use crate::phase_options::{PhaseOptions, Rename};
use crate::signature::{self, Signature, Ty};
use crate::text::plain;

/// A flow.
#[derive(Debug, PartialEq)]
pub(crate) struct Flow {
    pub(crate) ident: Ident,
    pub(crate) options: FlowOptions,
    pub(crate) phases: Vec<Phase>,
    pub(crate) handlers: Vec<Handler>,
    pub(crate) reconciles: Vec<Reconcile>,
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

/// A `reconcile` fn.
#[derive(Debug, PartialEq)]
pub(crate) struct Reconcile {
    pub(crate) name: Ident,
    /// The point from which the call is made.
    pub(crate) at: Ident,
    pub(crate) with: Vec<Ident>,
    pub(crate) signature: Signature,
}

/// What one fn is given when it is called at a point.
pub(crate) struct Takes<'a> {
    pub(crate) at: &'a Ident,
    with: &'a [Ident],
    pub(crate) signature: &'a Signature,
}

/// Puts the flow together from what was read.
pub(crate) fn flow(block: &Block, options: FlowOptions, errors: &mut Errors) -> Flow {
    let mut flow = Flow {
        ident: block.ident.clone(),
        options,
        phases: Vec::new(),
        handlers: Vec::new(),
        reconciles: Vec::new(),
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
        match kind {
            MarkKind::Atomic | MarkKind::External => {
                let (arrow, options) = marks::phase(kind, &mark.name, arguments, errors);
                let signature = signature::read(kind, &marked.signature, errors);
                self.incomplete |= arrow.is_none();
                self.phases.extend(arrow.map(|arrow| Phase {
                    name: name.clone(),
                    kind,
                    arrow,
                    options,
                    signature,
                }));
            }
            MarkKind::OnReject => {
                let (at, options) = marks::on_reject(&mark.name, arguments, errors);
                let signature = signature::read(kind, &marked.signature, errors);
                self.handlers.push(Handler {
                    name: name.clone(),
                    at,
                    with: options.with,
                    signature,
                });
            }
            MarkKind::Reconcile => {
                let (at, options) = marks::reconcile(&mark.name, arguments, errors);
                let signature = signature::read(kind, &marked.signature, errors);
                self.reconciles.extend(at.map(|at| Reconcile {
                    name: name.clone(),
                    at,
                    with: options.with,
                    signature,
                }));
            }
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
            .chain([end(FINISHED)])
            .collect()
    }

    /// Every fn of the flow, at each point where it is called: the phases, then the others.
    fn takers(&self) -> impl Iterator<Item = Takes<'_>> {
        let phases = self.phases.iter().map(Phase::takes);
        let handlers = self
            .handlers
            .iter()
            .flat_map(|handler| handler.at.iter().map(|at| handler.takes(at)));
        let reconciles = self.reconciles.iter().map(Reconcile::takes);
        phases.chain(handlers).chain(reconciles)
    }

    /// The type of the value that is stored at a point: that which its takers take. None if nobody
    /// takes it; then it may be any.
    pub(crate) fn payload(&self, point: &Ident) -> Option<&Ty> {
        let here = self
            .takers()
            .filter(|takes| takes.at == point)
            .find_map(|takes| takes.value());
        let ahead = || {
            self.takers()
                .find_map(|takes| takes.asked().find(|(asked, _)| *asked == point))
        };
        here.or_else(|| ahead().map(|(_, ty)| ty))
    }

    /// Whether some fn takes the value of `point` at `at` or ahead of it.
    pub(crate) fn is_taken_from(&self, at: &Ident, point: &Ident) -> bool {
        let arrows = self.arrows();
        self.takers()
            .filter(|takes| arrows.leads(&at.to_string(), &takes.at.to_string()))
            .any(|takes| takes.values().iter().any(|(taken, _)| *taken == point))
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
        let all = self.takers().map(|takes| takes.signature);
        first
            .map(|phase| &phase.signature)
            .chain(all)
            .find_map(|signature| signature.request.as_ref())
    }

    /// The fn that asks what became of a call that is made from this point.
    pub(crate) fn reconcile_at(&self, point: &Ident) -> Option<&Reconcile> {
        self.reconciles
            .iter()
            .find(|reconcile| reconcile.at == *point)
    }

    /// The names under which older versions stored a point.
    pub(crate) fn old_names(&self, point: &Ident) -> Vec<&str> {
        self.renames()
            .filter(|rename| rename.point == *point)
            .map(|rename| rename.old.value.as_str())
            .collect()
    }

    pub(crate) fn renames(&self) -> impl Iterator<Item = &Rename> {
        self.phases.iter().flat_map(|phase| &phase.options.renames)
    }
}

impl Phase {
    pub(crate) fn takes(&self) -> Takes<'_> {
        Takes {
            at: &self.arrow.from,
            with: &self.options.with,
            signature: &self.signature,
        }
    }

    pub(crate) fn is_external(&self) -> bool {
        self.kind == MarkKind::External
    }

    /// Its call may not, or not for ever, be made again: it may have to be announced, and asked about.
    pub(crate) fn has_intent(&self) -> bool {
        self.options.at_most_once || self.options.dedupes_for_millis.is_some()
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
    /// What it is given for a rejection at one of its points.
    pub(crate) fn takes<'a>(&'a self, at: &'a Ident) -> Takes<'a> {
        Takes {
            at,
            with: &self.with,
            signature: &self.signature,
        }
    }
}

impl Reconcile {
    pub(crate) fn takes(&self) -> Takes<'_> {
        Takes {
            at: &self.at,
            with: &self.with,
            signature: &self.signature,
        }
    }
}

impl<'a> Takes<'a> {
    /// The value of the point itself, if it takes it: there is one value more than `with(..)` asks for.
    pub(crate) fn value(&self) -> Option<&'a Ty> {
        let values = &self.signature.values;
        values.first().filter(|_| values.len() > self.with.len())
    }

    /// The values it asks for by `with(..)`.
    pub(crate) fn asked(&self) -> impl Iterator<Item = (&'a Ident, &'a Ty)> + use<'a> {
        let values = &self.signature.values;
        let first = usize::from(self.value().is_some());
        self.with.iter().zip(values.iter().skip(first))
    }

    /// All values, in the order of the parameters: of which point, and as which type.
    pub(crate) fn values(&self) -> Vec<(&'a Ident, &'a Ty)> {
        let own = self.value().map(|ty| (self.at, ty));
        own.into_iter().chain(self.asked()).collect()
    }
}
