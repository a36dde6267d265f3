//! Questions about the arrows as a graph, answered by name and without knowing what a phase is:
//! which points there are, what lies ahead, whether a way leads around a point or in a circle.
//! The graphs have a dozen points, so every answer is the plainest search.

use proc_macro2::Ident;

use crate::marks::Arrow;

pub(crate) const STARTED: &str = "Started";
pub(crate) const FINISHED: &str = "Finished";

/// The arrows of a flow.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arrows(pub(crate) Vec<Arrow>);

impl Arrows {
    /// The points between `Started` and `Finished`, in the order of the flow: none before all that
    /// lead to it, and otherwise as written.
    pub(crate) fn points(&self) -> Vec<Ident> {
        let mut waiting: Vec<&Ident> = Vec::new();
        for point in self
            .0
            .iter()
            .flat_map(|arrow| [&arrow.from].into_iter().chain(&arrow.to))
        {
            if *point != STARTED && *point != FINISHED && !waiting.contains(&point) {
                waiting.push(point);
            }
        }
        let mut ordered = Vec::new();
        while !waiting.is_empty() {
            let is_free =
                |point: &&Ident| !self.sources(point).any(|source| waiting.contains(&source));
            // In a circle no point is free; the circle is reported elsewhere.
            let next = waiting.iter().position(is_free).unwrap_or(0);
            ordered.push(waiting.remove(next).clone());
        }
        ordered
    }

    fn sources<'a>(&'a self, point: &'a Ident) -> impl Iterator<Item = &'a Ident> {
        self.0
            .iter()
            .filter(move |arrow| arrow.to.contains(point))
            .map(|arrow| &arrow.from)
    }

    fn targets<'a>(&'a self, point: &'a str) -> impl Iterator<Item = &'a Ident> {
        self.0
            .iter()
            .filter(move |arrow| arrow.from == point)
            .flat_map(|arrow| &arrow.to)
    }

    pub(crate) fn is_left(&self, point: &Ident) -> bool {
        self.0.iter().any(|arrow| arrow.from == *point)
    }

    pub(crate) fn is_reached(&self, point: &Ident) -> bool {
        self.0.iter().any(|arrow| arrow.to.contains(point))
    }

    /// Whether a flow at `from` may come to `to`, or is there already.
    pub(crate) fn leads(&self, from: &str, to: &str) -> bool {
        self.path(from, to, None).is_some()
    }

    /// A way from `from` to `to` that does not pass `around`, both ends named.
    pub(crate) fn path(&self, from: &str, to: &str, around: Option<&str>) -> Option<Vec<String>> {
        let mut ways = vec![vec![from.to_owned()]];
        let mut seen = vec![from.to_owned()];
        while let Some(way) = (!ways.is_empty()).then(|| ways.remove(0)) {
            let here = way.last().cloned().unwrap_or_default();
            if here == to {
                return Some(way);
            }
            for next in self.targets(&here).map(Ident::to_string) {
                if around != Some(next.as_str()) && !seen.contains(&next) {
                    seen.push(next.clone());
                    ways.push(way.iter().cloned().chain([next]).collect());
                }
            }
        }
        None
    }

    /// The arrow that closes a circle: one back to a point that an arrow written before has left, if
    /// there is one. Its target, and the way around.
    pub(crate) fn cycle(&self) -> Option<(&Ident, Vec<String>)> {
        let closing = self.0.iter().enumerate().flat_map(|(index, arrow)| {
            arrow.to.iter().filter_map(move |to| {
                let way = self.path(&to.to_string(), &arrow.from.to_string(), None)?;
                let leads_back = self.0[..index].iter().any(|earlier| earlier.from == *to);
                Some((
                    leads_back,
                    to,
                    way.into_iter().chain([to.to_string()]).collect(),
                ))
            })
        });
        // The first of those that lead back; without any, the last of all.
        let (_, to, way) = closing.reduce(|first, next| if first.0 { first } else { next })?;
        Some((to, way))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quote::format_ident;

    fn arrows(arrows: &[(&str, &[&str])]) -> Arrows {
        let ident = |name: &&str| format_ident!("{name}");
        Arrows(
            arrows
                .iter()
                .map(|(from, to)| Arrow {
                    from: ident(from),
                    to: to.iter().map(ident).collect(),
                })
                .collect(),
        )
    }

    fn booking() -> Arrows {
        arrows(&[
            ("Settled", &["Finished"]),
            ("Quoted", &["Reserved", "SoldOut"]),
            ("Started", &["Quoted"]),
            ("SoldOut", &["Settled"]),
            ("Reserved", &["Settled"]),
        ])
    }

    #[test]
    fn points_come_in_the_order_of_the_flow() {
        assert_eq!(
            booking().points(),
            ["Quoted", "Reserved", "SoldOut", "Settled"]
        );
    }

    #[test]
    fn a_way_around_a_point_is_found_if_there_is_one() {
        let booking = booking();
        assert_eq!(
            booking.path(STARTED, "Settled", Some("Reserved")).unwrap(),
            ["Started", "Quoted", "SoldOut", "Settled"]
        );
        assert_eq!(booking.path(STARTED, "Settled", Some("Quoted")), None);
        assert!(
            booking.leads("Quoted", FINISHED)
                && booking.leads("Quoted", "Quoted")
                && !booking.leads("Reserved", "SoldOut")
        );
    }

    #[test]
    fn circles_are_found() {
        assert!(booking().cycle().is_none());
        let circle = arrows(&[
            ("Started", &["A"]),
            ("A", &["B"]),
            ("B", &["A", "Finished"]),
        ]);
        let (closing, way) = circle.cycle().unwrap();
        assert_eq!(closing, "A");
        assert_eq!(way, ["A", "B", "A"]);
        assert_eq!(circle.points(), ["A", "B"]);
    }
}
