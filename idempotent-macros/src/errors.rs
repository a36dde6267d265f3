//! Where mistakes are collected. A macro that stops at the first mistake makes its user compile once
//! per mistake; so every stage reports here and goes on with what it could read. A store that is
//! dropped without having been asked is a bug in the macro, and panics in debug builds.

use std::fmt::Display;

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;

/// The mistakes found so far, in the order in which they were found.
#[derive(Debug, Default)]
pub(crate) struct Errors {
    found: Vec<syn::Error>,
    asked: bool,
}

impl Errors {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Reports a mistake on all the tokens given.
    pub(crate) fn on(&mut self, tokens: impl ToTokens, message: impl Display) {
        self.found.push(syn::Error::new_spanned(tokens, message));
    }

    /// Reports a mistake at one place.
    pub(crate) fn at(&mut self, span: Span, message: impl Display) {
        self.found.push(syn::Error::new(span, message));
    }

    pub(crate) fn count(&self) -> usize {
        self.found.len()
    }

    /// Ends the collecting: nothing, or everything that was found.
    pub(crate) fn finish(mut self) -> Result<(), Vec<syn::Error>> {
        self.asked = true;
        let found = std::mem::take(&mut self.found);
        if found.is_empty() { Ok(()) } else { Err(found) }
    }
}

impl Drop for Errors {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            debug_assert!(self.asked, "mistakes were collected and never reported");
        }
    }
}

/// One `compile_error!` per mistake, on the user's tokens.
pub(crate) fn compile_errors(errors: &[syn::Error]) -> TokenStream {
    errors.iter().map(syn::Error::to_compile_error).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finishing_gives_every_mistake_in_order() {
        let mut errors = Errors::new();
        errors.at(Span::call_site(), "first");
        errors.at(Span::call_site(), "second");
        let found: Vec<String> = errors
            .finish()
            .unwrap_err()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(found, ["first", "second"]);
    }

    #[test]
    fn finishing_without_mistakes_is_fine() {
        assert!(Errors::new().finish().is_ok());
    }

    #[test]
    #[should_panic(expected = "never reported")]
    #[cfg(debug_assertions)]
    fn dropping_it_unasked_panics() {
        drop(Errors::new());
    }
}
