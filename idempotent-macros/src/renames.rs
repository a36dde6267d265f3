//! Old names of points: each must say for one point what it once was, or a row of an older version could
//! not be told from one of today's.

use proc_macro2::Ident;

use crate::errors::Errors;
use crate::graph::FINISHED;
use crate::model::{Flow, Phase};
use crate::phase_options::Rename;
use crate::text::{list, snake_case, suggestion};

/// Reports the renames that lead nowhere or to two points.
pub(crate) fn report(flow: &Flow, errors: &mut Errors) {
    let points = flow.points();
    let mut seen: Vec<&Rename> = Vec::new();
    for phase in &flow.phases {
        for rename in &phase.options.renames {
            let Rename { point, old } = rename;
            let name = &old.value;
            let now = points
                .iter()
                .find(|point| snake_case(&point.to_string()) == *name);
            let before = seen.iter().find(|before| before.old == *old);
            if !phase.arrow.to.contains(point) {
                errors.on(point, elsewhere(flow, phase, point));
            } else if *point == FINISHED {
                errors.on(
                    point,
                    "`Finished` has this name in every flow and every version",
                );
            } else if now == Some(point) {
                errors.at(
                    old.span,
                    format!("`{point}` is stored as \"{name}\" today; `renamed_from` has the name it had before"),
                );
            } else if let Some(other) = now {
                errors.at(
                    old.span,
                    format!("\"{name}\" is the name of `{other}` today: a flow that is stored there could not be told from one that stands at what is now `{point}`"),
                );
            } else if let Some(before) = before {
                let message = if before.point == *point {
                    format!("`{point}` is renamed from \"{name}\" already; once is enough")
                } else {
                    format!(
                        "\"{name}\" was one point: it cannot be both `{}` and `{point}` now",
                        before.point
                    )
                };
                errors.at(old.span, message);
            }
            seen.push(rename);
        }
    }
}

fn elsewhere(flow: &Flow, phase: &Phase, point: &Ident) -> String {
    let mut phases = flow.phases.iter();
    let reached = list(&phase.arrow.to);
    match phases.find(|other| other.arrow.to.contains(point)) {
        Some(other) => format!(
            "a point is renamed at the arrow that reaches it: move `renamed_from({point} = ..)` to `{}`; this arrow reaches {reached}",
            other.name
        ),
        None => {
            let targets: Vec<String> = phase.arrow.to.iter().map(Ident::to_string).collect();
            let meant = suggestion(&point.to_string(), targets.iter().map(String::as_str));
            format!("this arrow does not reach `{point}`{meant} (it reaches {reached})")
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::mistakes;
    use quote::quote;

    #[test]
    fn an_old_name_leads_to_one_point() {
        for (first, second, message) in [
            (
                quote!(A = "old_a", A = "older_a"),
                quote!(B = "old_b"),
                None,
            ),
            (
                quote!(B = "old_b"),
                quote!(B = "older_b"),
                Some("move `renamed_from(B = ..)` to `second`"),
            ),
            (
                quote!(Elsewhere = "old_c"),
                quote!(B = "old_b"),
                Some("this arrow does not reach `Elsewhere` (it reaches `A`)"),
            ),
            (
                quote!(A = "a"),
                quote!(B = "old_b"),
                Some("`A` is stored as \"a\" today"),
            ),
            (
                quote!(A = "b"),
                quote!(B = "old_b"),
                Some("\"b\" is the name of `B` today"),
            ),
            (
                quote!(A = "started"),
                quote!(B = "old_b"),
                Some("\"started\" is the name of `Started` today"),
            ),
            (
                quote!(A = "old"),
                quote!(B = "old"),
                Some("it cannot be both `A` and `B` now"),
            ),
            (
                quote!(A = "old", A = "old"),
                quote!(B = "old_b"),
                Some("once is enough"),
            ),
            (
                quote!(A = "old_a"),
                quote!(Finished = "done"),
                Some("`Finished` has this name in every flow"),
            ),
        ] {
            let found = mistakes(quote! {
                #[atomic(Started -> A, renamed_from(#first))]
                async fn first(&self, tx: &mut Tx<'_>, request: &R) -> Result<(), E> { .. }
                #[external(A -> B | Finished, renamed_from(#second))]
                async fn second(&self, call: &External<'_>) -> Result<ParcelFlowSecondOutcome<(), Reply<()>>, E> { .. }
                #[atomic(B -> Finished)]
                async fn third(&self, tx: &mut Tx<'_>) -> Result<Reply<()>, E> { .. }
            });
            assert_eq!(found.len(), usize::from(message.is_some()), "{found:?}");
            assert!(
                found
                    .iter()
                    .all(|found| found.contains(message.unwrap_or_default())),
                "{found:?}"
            );
        }
    }
}
