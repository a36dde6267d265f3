//! What must hold for a flow to be one: every point is reached and left, by one phase, without a
//! circle; each phase is given the values it takes. A mistake is reported once, where it was made,
//! and names both ends: a gap between two phases is one mistake, though it leaves one point unreached
//! and another one a dead end.
//!
//! The fns beside the phases are checked in [`asides`], gaps in [`gaps`], old names in [`renames`].
//!
//! Deliberately absent: whether types fit. The macro sees tokens; the expansion makes the compiler ask.

use proc_macro2::Ident;

use crate::asides;
use crate::errors::Errors;
use crate::gaps;
use crate::graph::{Arrows, FINISHED, STARTED};
use crate::marks::Arrow;
use crate::model::{Flow, Phase};
use crate::renames;
use crate::text::{list, snake_case, suggestion};

/// Reports everything that is wrong with the flow as a whole.
pub(crate) fn flow(flow: &Flow, errors: &mut Errors) {
    if flow.phases.is_empty() {
        if !flow.incomplete {
            let message = format!(
                "`{}` has no phase: mark an async fn of this block with `#[atomic(Started -> Finished)]`, or with an arrow to a point on the way",
                flow.ident
            );
            errors.on(&flow.ident, message);
        }
        return;
    }
    let arrows = flow.arrows();
    stored_names(&arrows, errors);
    one_phase_per_point(flow, errors);
    call_names(flow, errors);
    let circle = arrows.cycle();
    if let Some((closing, way)) = &circle {
        let way = way.join(" -> ");
        errors.on(closing, format!("the flow runs in a circle: {way}; each phase moves on, or a run might never end (a failed phase is repeated by itself)"));
    }
    if circle.is_none() && !flow.incomplete {
        gaps::report(flow, &arrows, errors);
    }
    for phase in &flow.phases {
        with(
            &phase.options.with,
            &[&phase.arrow.from],
            flow,
            &arrows,
            errors,
        );
        values(phase, errors);
    }
    asides::report(flow, &arrows, errors);
    renames::report(flow, errors);
}

/// Two points must not be stored under one name.
fn stored_names(arrows: &Arrows, errors: &mut Errors) {
    let points = arrows.points();
    for (index, point) in points.iter().enumerate() {
        let name = snake_case(&point.to_string());
        if matches!(name.as_str(), "started" | "finished") {
            let meant = if name == "started" { STARTED } else { FINISHED };
            errors.on(point, format!("`{point}` would be stored as `{name}`, as `{meant}` is; did you mean `{meant}`?"));
        } else if let Some(other) = points[..index]
            .iter()
            .find(|other| snake_case(&other.to_string()) == name)
        {
            errors.on(
                point,
                format!("`{point}` would be stored as `{name}`, as `{other}` is"),
            );
        }
    }
}

fn one_phase_per_point(flow: &Flow, errors: &mut Errors) {
    for (index, phase) in flow.phases.iter().enumerate() {
        let from = &phase.arrow.from;
        if let Some(other) = flow.phases[..index]
            .iter()
            .find(|other| other.arrow.from == *from)
        {
            errors.on(
                from,
                format!("`{from}` is left by `{}` already, so `{}` cannot leave it too: a flow that stands there must know how it goes on (one phase may end at several points: `{from} -> A | B`)", other.name, phase.name),
            );
        }
    }
}

fn call_names(flow: &Flow, errors: &mut Errors) {
    let externals: Vec<&Phase> = flow
        .phases
        .iter()
        .filter(|phase| phase.is_external())
        .collect();
    for (index, phase) in externals.iter().enumerate() {
        let name = phase.call_name();
        if let Some(other) = externals[..index]
            .iter()
            .find(|other| other.call_name() == name)
        {
            let span = phase
                .options
                .key
                .as_ref()
                .map_or(phase.name.span(), |key| key.span);
            errors.at(
                span,
                format!("`{}` and `{}` are both the call `{name}`: they would send the same derived key, and the outside would take the second for a repetition of the first", other.name, phase.name),
            );
        }
    }
}

/// `with(P)` is given what P stored, so P must lie on every way to here.
pub(crate) fn with(
    with: &[Ident],
    at: &[&Ident],
    flow: &Flow,
    arrows: &Arrows,
    errors: &mut Errors,
) {
    let points = flow.points();
    for (index, asked) in with.iter().enumerate() {
        if *asked == STARTED {
            errors.on(asked, "no value is stored at `Started`: what came in there is the request; take a parameter `request`");
        } else if *asked == FINISHED {
            errors.on(
                asked,
                "the value at `Finished` is the reply: no phase comes after it",
            );
        } else if !points.contains(asked) {
            let names: Vec<String> = points.iter().map(Ident::to_string).collect();
            let names = || {
                names
                    .iter()
                    .map(String::as_str)
                    .filter(|name| *name != STARTED && *name != FINISHED)
            };
            errors.on(
                asked,
                format!(
                    "this flow has no point `{asked}`{} (it has {})",
                    suggestion(&asked.to_string(), names()),
                    list(names())
                ),
            );
        } else if with[..index].contains(asked) {
            errors.on(asked, format!("`{asked}` is asked for twice"));
        } else if at.contains(&asked) {
            errors.on(asked, format!("the value of `{asked}` is the first that is passed anyway: it is where the flow stands; `with(..)` asks for values from before"));
        } else if let Some(way) = at
            .iter()
            .find_map(|at| arrows.path(STARTED, &at.to_string(), Some(&asked.to_string())))
        {
            let here = list(at);
            let why = format!("a flow may come to {here} without it: {}", way.join(" -> "));
            errors.on(asked, format!("the value of `{asked}` is not always there: {why}; `with(..)` asks for points that lie on every way"));
        }
    }
}

fn values(phase: &Phase, errors: &mut Errors) {
    let Phase {
        name,
        arrow: Arrow { from, .. },
        signature,
        options,
        ..
    } = phase;
    if *from == STARTED && signature.request.is_none() {
        let message = match signature.values.len().checked_sub(options.with.len()) {
            Some(1) => format!(
                "`{name}` leaves `Started`, so what it takes is the request, and the parameter is named so: `request: &{}`",
                signature.values[0]
            ),
            _ => format!(
                "`{name}` leaves `Started`, so it takes the request: a last parameter `request: &..` (its type is the flow's request type)"
            ),
        };
        errors.on(name, message);
        return;
    }
    count(name, from, signature.values.len(), &options.with, errors);
}

/// There are as many values as `with(..)` asks for, and one more for the point itself.
pub(crate) fn count(name: &Ident, at: &Ident, given: usize, with: &[Ident], errors: &mut Errors) {
    let leading = usize::from(*at != STARTED);
    if (with.len()..=with.len() + leading).contains(&given) {
        return;
    }
    let values = |count: usize| format!("{count} value{}", if count == 1 { "" } else { "s" });
    let mut order: Vec<String> = Vec::new();
    if leading == 1 {
        order.push(format!("that of `{at}`"));
    }
    order.extend(with.iter().map(|point| format!("that of `{point}`")));
    let order = if order.is_empty() {
        "there is none at `Started`".to_owned()
    } else {
        format!("in this order: {}", order.join(", "))
    };
    let hint = if given > with.len() + leading {
        "; values from before are asked for by `with(..)`, and the request is the parameter named `request`"
    } else {
        ""
    };
    errors.on(
        name,
        format!(
            "`{name}` takes {}, but is given {} ({order}){hint}",
            values(given),
            values(with.len() + leading)
        ),
    );
}
