//! The documentation that the macro adds to the user's: the flow's transitions as a table and as a
//! diagram, on the impl block. Names are code and not links: phases are mostly private, and rustdoc
//! warns about links from public pages to private items.

use proc_macro2::{Ident, TokenStream};
use quote::quote;

use crate::attr::MarkKind;
use crate::graph::{FINISHED, STARTED};
use crate::model::{Flow, Phase};
use crate::text::{duration, list, plain, snake_case};

/// The table and the diagram, as `#[doc]` attributes.
pub(crate) fn block(flow: &Flow) -> TokenStream {
    // The first line ends what the user wrote on the block.
    let text = format!("\n{}\n{}", table(flow), mermaid(flow));
    quote!(#[doc = #text])
}

fn table(flow: &Flow) -> String {
    let mut text = format!("# Transitions of the flow `{}`\n\n", flow.options.name);
    text.push_str("| from | phase | to | |\n| --- | --- | --- | --- |\n");
    for phase in &flow.phases {
        let to: Vec<String> = phase.arrow.to.iter().map(|to| format!("`{to}`")).collect();
        let from = &phase.arrow.from;
        text.push_str(&format!(
            "| `{from}` | `{}` | {} | {} |\n",
            plain(&phase.name),
            to.join(" or "),
            remarks(phase)
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

fn remarks(phase: &Phase) -> String {
    let mut remarks = vec![match phase.kind {
        MarkKind::External if phase.call_name() == plain(&phase.name) => "external".to_owned(),
        MarkKind::External => format!("external, the call `{}`", phase.call_name()),
        MarkKind::Atomic | MarkKind::OnReject => "atomic".to_owned(),
    }];
    remarks.extend(
        phase
            .options
            .timeout_millis
            .map(|millis| format!("at most {}", duration(millis))),
    );
    remarks.join(", ")
}

/// The same picture as `Flow::graph().mermaid()` draws.
fn mermaid(flow: &Flow) -> String {
    let mut text = String::from("```mermaid\nstateDiagram-v2\n    [*] --> started\n");
    for phase in &flow.phases {
        let kind = if phase.kind == MarkKind::External {
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
        _ => format!(
            "Reached by {}; {} goes on from here.",
            list(arriving),
            list(leaving)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{booking, model};

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
}
