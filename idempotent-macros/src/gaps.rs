//! Points that nobody leaves and points that nobody reaches. A gap between two phases makes one of each
//! and is one mistake, so they are reported in pairs, and alone only where there is no other side.

use proc_macro2::Ident;

use crate::errors::Errors;
use crate::graph::{Arrows, FINISHED, STARTED};
use crate::marks::MarkKind;
use crate::model::{Flow, Phase};
use crate::text::{did_you_mean, suggestion};

/// One end of a gap: a point that no phase leaves, or that none reaches, and the phase that names it.
struct Loose<'a> {
    point: &'a Ident,
    phase: &'a Phase,
}

/// Reports the points that nobody leaves and those that nobody reaches, in pairs where they can be
/// the two sides of one mistake.
pub(crate) fn report(flow: &Flow, arrows: &Arrows, errors: &mut Errors) {
    let mut unreached: Vec<Loose<'_>> = Vec::new();
    let mut dead_ends: Vec<Loose<'_>> = Vec::new();
    for phase in &flow.phases {
        let from = &phase.arrow.from;
        if *from != STARTED
            && !arrows.is_reached(from)
            && !unreached.iter().any(|loose| loose.point == from)
        {
            unreached.push(Loose { point: from, phase });
        }
        for to in &phase.arrow.to {
            if *to != FINISHED
                && !arrows.is_left(to)
                && !dead_ends.iter().any(|loose| loose.point == to)
            {
                dead_ends.push(Loose { point: to, phase });
            }
        }
    }
    pair_up(flow, &mut unreached, &mut dead_ends, errors);
    let nothing_leaves_started = !flow.phases.iter().any(|phase| phase.arrow.from == STARTED);
    let nothing_reaches_finished = !flow
        .phases
        .iter()
        .any(|phase| phase.arrow.to.iter().any(|to| *to == FINISHED));
    if nothing_leaves_started {
        let first = if unreached.is_empty() {
            None
        } else {
            Some(unreached.remove(0))
        };
        let Loose { point, phase } = first.unwrap_or(Loose {
            point: &flow.phases[0].arrow.from,
            phase: &flow.phases[0],
        });
        errors.on(
            point,
            format!("nothing leaves `Started`, where every request begins: the first phase is `#[{}(Started -> ..)]`; `{}` starts from `{point}`, but no phase ends there", mark(phase), phase.name),
        );
    }
    if nothing_reaches_finished {
        let last = dead_ends.pop();
        let Loose { point, phase } = last.unwrap_or(Loose {
            point: &flow.phases[0].arrow.from,
            phase: &flow.phases[0],
        });
        errors.on(
            point,
            format!("nothing reaches `Finished`, where the reply is stored: `{}` ends at `{point}`, and no phase goes on from there", phase.name),
        );
    }
    for Loose { point, phase } in unreached {
        errors.on(
            point,
            format!(
                "nobody reaches `{point}`: `{}` starts from it, but no phase ends there{}",
                phase.name,
                or(arrows, point)
            ),
        );
    }
    for Loose { point, phase } in dead_ends {
        errors.on(
            point,
            format!("nobody leaves `{point}`: `{}` ends there, and a flow that arrives would stay for ever; add a phase `{point} -> ..`, or end at `Finished`{}", phase.name, or(arrows, point)),
        );
    }
}

fn mark(phase: &Phase) -> &'static str {
    match phase.kind {
        MarkKind::External => "external",
        _ => "atomic",
    }
}

fn or(arrows: &Arrows, point: &Ident) -> String {
    let others: Vec<String> = arrows
        .points()
        .iter()
        .filter(|other| *other != point)
        .map(Ident::to_string)
        .collect();
    suggestion(
        &point.to_string(),
        others.iter().map(String::as_str).chain([STARTED, FINISHED]),
    )
}

/// A phase that starts where nobody ends, and one that ends where nobody starts, are one gap: those
/// with similar names first, then in the order written.
fn pair_up(
    flow: &Flow,
    unreached: &mut Vec<Loose<'_>>,
    dead_ends: &mut Vec<Loose<'_>>,
    errors: &mut Errors,
) {
    let position = |phase: &Phase| {
        flow.phases
            .iter()
            .position(|other| other.name == phase.name)
    };
    let mut remaining = Vec::new();
    for start in unreached.drain(..) {
        let names: Vec<String> = dead_ends.iter().map(|end| end.point.to_string()).collect();
        let similar = did_you_mean(&start.point.to_string(), names.iter().map(String::as_str));
        let similar = similar.and_then(|name| dead_ends.iter().position(|end| end.point == name));
        let before = || {
            dead_ends
                .iter()
                .position(|end| position(end.phase) < position(start.phase))
        };
        let Some(end) = similar.or_else(before) else {
            remaining.push(start);
            continue;
        };
        let end = dead_ends.remove(end);
        let meant = if similar.is_some() {
            format!("; did you mean `{}`?", end.point)
        } else {
            String::new()
        };
        errors.on(
            start.point,
            format!(
                "`{}` starts from `{}`, but the phase before it, `{}`, ends at `{}`{meant}",
                start.phase.name, start.point, end.phase.name, end.point
            ),
        );
    }
    *unreached = remaining;
}
