//! The problems that the framework answers with, by their codes. A problem's `type` and its `Link`
//! with `rel="describedby"` lead here, unless the API has a page of its own
//! ([`Contract::documented_at`](super::Contract::documented_at)).
//!
#![doc = include_str!("problems.md")]

/// The page above, for [`all`].
const PAGE: &str = include_str!("problems.md");

/// What a problem means, and what a client should do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Described {
    /// The stable code.
    pub code: &'static str,
    /// In Markdown, beginning with the status.
    pub meaning: &'static str,
}

/// All problems of the framework, for an API that has a page or a schema of its own.
///
/// ```
/// use idempotent_core::http::problems;
///
/// let codes: Vec<&str> = problems::all().map(|problem| problem.code).collect();
/// assert!(codes.contains(&"key_missing"));
/// ```
pub fn all() -> impl Iterator<Item = Described> {
    PAGE.split("# ").filter_map(|section| {
        let (code, meaning) = section.split_once('\n')?;
        Some(Described {
            code: code.trim(),
            meaning: meaning.trim(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_is_one_code_with_its_status() {
        let problems: Vec<Described> = all().collect();
        assert!(problems.len() > 10);
        for problem in problems {
            assert!(
                problem
                    .code
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
                "{}",
                problem.code
            );
            assert!(problem.meaning.starts_with("Status "), "{}", problem.code);
        }
    }
}
