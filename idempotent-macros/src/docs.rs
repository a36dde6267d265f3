//! The documentation that the macro adds to the user's: the flow's transitions as a table and as a
//! diagram, on the flow's `impl Flow`. Names are code and not links: phases are mostly private, and rustdoc
//! warns about links from public pages to private items.

use proc_macro2::{Ident, TokenStream};
use quote::quote;

use crate::graph::{FINISHED, STARTED};
use crate::model::{Flow, Phase, Reconcile};
use crate::text::{duration, list, plain, snake_case};

/// The table and the diagram, as `#[doc]` attributes.
pub(crate) fn block(flow: &Flow) -> TokenStream {
    let text = format!("{}\n{}", table(flow), mermaid(flow));
    quote!(#[doc = #text])
}

fn table(flow: &Flow) -> String {
    let mut text = format!("# Transitions of the flow `{}`\n\n", flow.options.name);
    text.push_str("| from | phase | to | |\n| --- | --- | --- | --- |\n");
    for phase in &flow.phases {
        let from = &phase.arrow.from;
        text.push_str(&format!(
            "| `{from}` | `{}` | {} | {} |\n",
            plain(&phase.name),
            targets(phase),
            remarks(phase)
        ));
    }
    for (reconcile, phase) in reconciles(flow) {
        text.push_str(&format!(
            "| `{}` | `{}` | {} | asks the outside what became of `{}` |\n",
            reconcile.at,
            plain(&reconcile.name),
            targets(phase),
            plain(&phase.name)
        ));
    }
    for handler in &flow.handlers {
        for at in &handler.at {
            text.push_str(&format!(
                "| `{at}` | `{}` | `Finished` | when a phase rejects the request there |\n",
                plain(&handler.name)
            ));
        }
    }
    text
}

fn targets(phase: &Phase) -> String {
    let to: Vec<String> = phase.arrow.to.iter().map(|to| format!("`{to}`")).collect();
    to.join(" or ")
}

/// The `reconcile` fns, each with the phase whose call it asks about.
fn reconciles(flow: &Flow) -> impl Iterator<Item = (&Reconcile, &Phase)> {
    flow.reconciles.iter().filter_map(|reconcile| {
        let mut phases = flow.phases.iter();
        let asked_about = phases.find(|phase| phase.arrow.from == reconcile.at)?;
        Some((reconcile, asked_about))
    })
}

fn remarks(phase: &Phase) -> String {
    let options = &phase.options;
    let kind = match phase.is_external() {
        true if phase.call_name() == plain(&phase.name) => "external".to_owned(),
        true => format!("external, the call `{}`", phase.call_name()),
        false => "atomic".to_owned(),
    };
    let at_most_once = options
        .at_most_once
        .then(|| "called at most once".to_owned());
    let dedupes_for = options.dedupes_for_millis.map(duration);
    let dedupes_for = dedupes_for.map(|how_long| format!("repeatable for {how_long}"));
    let timeout = options.timeout_millis.map(duration);
    let timeout = timeout.map(|how_long| format!("at most {how_long}"));
    let retries = options
        .retries
        .map(|times| format!("up to {times} retries"));
    let remarks: Vec<String> = [Some(kind), at_most_once, dedupes_for, timeout, retries]
        .into_iter()
        .flatten()
        .collect();
    remarks.join(", ")
}

/// The same picture as `Flow::graph().mermaid()` draws.
fn mermaid(flow: &Flow) -> String {
    let mut text = String::from("```mermaid\nstateDiagram-v2\n    [*] --> started\n");
    for phase in &flow.phases {
        let kind = if phase.is_external() {
            "external"
        } else {
            "atomic"
        };
        for to in &phase.arrow.to {
            text.push_str(&format!(
                "    {} --> {}: {} ({kind})\n",
                stored(&phase.arrow.from),
                stored(to),
                plain(&phase.name)
            ));
        }
    }
    for reconcile in &flow.reconciles {
        text.push_str(&format!(
            "    {0} --> {0}: {1} (asks what became of the call)\n",
            stored(&reconcile.at),
            plain(&reconcile.name)
        ));
    }
    for handler in &flow.handlers {
        for at in &handler.at {
            text.push_str(&format!(
                "    {} --> finished: {} (rejected)\n",
                stored(at),
                plain(&handler.name)
            ));
        }
    }
    text.push_str("    finished --> [*]\n```\n");
    text
}

fn stored(point: &Ident) -> String {
    snake_case(&point.to_string())
}

/// What there is to say about a point: who comes there, and who goes on.
pub(crate) fn point(flow: &Flow, point: &Ident) -> String {
    let arriving: Vec<String> = flow
        .phases
        .iter()
        .filter(|phase| phase.arrow.to.contains(point))
        .map(|phase| plain(&phase.name))
        .collect();
    let leaving: Vec<String> = flow
        .phases
        .iter()
        .filter(|phase| phase.arrow.from == *point)
        .map(|phase| plain(&phase.name))
        .collect();
    match point.to_string().as_str() {
        STARTED => format!(
            "The request is stored, and nothing has been done yet; {} begins.",
            list(leaving)
        ),
        FINISHED => format!(
            "The reply is stored, by {}, and every retry gets it.",
            list(arriving)
        ),
        _ => {
            let arriving = list(arriving);
            let leaving = list(leaving);
            let old_names = flow.old_names(point);
            let before = if old_names.is_empty() {
                String::new()
            } else {
                format!(" Stored as {} by older versions.", list(old_names))
            };
            format!("Reached by {arriving}; {leaving} goes on from here.{before}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{booking, model, parcel};

    #[test]
    fn the_table_has_a_row_for_each_arrow() {
        assert_eq!(table(&model(booking())), "\
# Transitions of the flow `booking`

| from | phase | to | |
| --- | --- | --- | --- |
| `Started` | `quote` | `Quoted` | atomic |
| `Quoted` | `reserve` | `Reserved` or `SoldOut` or `Finished` | external, the call `hold`, at most 10s |
| `SoldOut` | `wait_listed` | `Settled` | atomic, at most 2s |
| `Reserved` | `settle` | `Settled` | atomic |
| `Settled` | `confirm` | `Finished` | external |
| `Reserved` | `give_back` | `Finished` | when a phase rejects the request there |
| `SoldOut` | `give_back` | `Finished` | when a phase rejects the request there |
");
    }

    #[test]
    fn the_diagram_has_an_edge_for_each_arrow() {
        let diagram = mermaid(&model(booking()));
        assert!(
            diagram.contains("    quoted --> sold_out: reserve (external)\n"),
            "{diagram}"
        );
        assert!(
            diagram.contains("    sold_out --> finished: give_back (rejected)\n"),
            "{diagram}"
        );
    }

    #[test]
    fn a_point_tells_who_comes_and_who_goes_on() {
        let flow = model(booking());
        let settled = flow
            .points()
            .into_iter()
            .find(|point| point == "Settled")
            .unwrap();
        assert_eq!(
            point(&flow, &settled),
            "Reached by `wait_listed` and `settle`; `confirm` goes on from here."
        );
    }

    #[test]
    fn calls_that_are_made_once_and_who_asks_about_them_are_shown() {
        let flow = model(parcel());
        let table = table(&flow);
        for row in [
            "| `Started` | `pack` | `Packed` | atomic, up to 3 retries |\n",
            "| `Packed` | `send` | `Sent` or `Refused` | external, called at most once |\n",
            "| `Sent` | `insure` | `Insured` | external, repeatable for 1d, up to 5 retries |\n",
            "| `Packed` | `look_up` | `Sent` or `Refused` | asks the outside what became of `send` |\n",
        ] {
            assert!(table.contains(row), "{table}");
        }
        let diagram = mermaid(&flow);
        let edge = "    packed --> packed: look_up (asks what became of the call)\n";
        assert!(diagram.contains(edge), "{diagram}");
        let sent = flow.points().into_iter().find(|point| point == "Sent");
        assert!(
            point(&flow, &sent.unwrap())
                .ends_with("Stored as `posted` and `handed_over` by older versions.")
        );
    }
}
