//! One option of an attribute at a time: `lease = "15s"`, `with(RideCreated)`, `at_once`. The tokens are
//! split at commas before any option is looked at, so that one that cannot be read does not hide the
//! mistakes in the others.
//!
//! Deliberately absent: which options there are. That is in [`attr`](crate::attr) and [`phase_options`](crate::phase_options).

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::ToTokens;
use syn::parse::{ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::{LitInt, LitStr, Token};

use crate::errors::Errors;
use crate::phase_options::{Isolation, Rename};
use crate::text::{Text, list, millis, snake_case, suggestion};

/// The options seen so far, to find those given twice and those that do not go together.
#[derive(Default)]
pub(crate) struct Seen(Vec<Ident>);

impl Seen {
    pub(crate) fn twice(&mut self, name: &Ident, errors: &mut Errors) -> bool {
        let twice = self.0.contains(name);
        if twice {
            errors.on(name, format!("`{name}` is given twice"));
        }
        self.0.push(name.clone());
        twice
    }

    /// Where the option is written, if it is.
    pub(crate) fn named(&self, name: &str) -> Option<&Ident> {
        self.0.iter().find(|seen| *seen == name)
    }
}

/// `lease = "15s"`, `with(RideCreated)`
pub(crate) struct Opt {
    pub(crate) name: Ident,
    value: TokenStream,
    parenthesised: bool,
    /// A word, and nothing behind it.
    is_bare: bool,
}

/// Splits at the commas that are not inside of brackets.
pub(crate) fn chunks(tokens: TokenStream) -> Vec<TokenStream> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    tokens
        .split(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ','))
        .filter(|chunk| !chunk.is_empty())
        .map(|chunk| chunk.iter().cloned().collect())
        .collect()
}

pub(crate) fn option(chunk: TokenStream, errors: &mut Errors) -> Option<Opt> {
    let mut tokens = chunk.clone().into_iter();
    match (tokens.next(), tokens.next()) {
        (Some(TokenTree::Ident(name)), None) => Some(Opt {
            name,
            value: TokenStream::new(),
            parenthesised: false,
            is_bare: true,
        }),
        (Some(TokenTree::Ident(name)), Some(TokenTree::Punct(equals)))
            if equals.as_char() == '=' =>
        {
            Some(Opt {
                name,
                value: tokens.collect(),
                parenthesised: false,
                is_bare: false,
            })
        }
        (Some(TokenTree::Ident(name)), Some(TokenTree::Group(group)))
            if tokens.next().is_none() =>
        {
            Some(Opt {
                name,
                value: group.stream(),
                parenthesised: true,
                is_bare: false,
            })
        }
        _ => {
            errors.on(
                chunk,
                "expected an option, as in `timeout = \"10s\"` or `with(RideCreated)`",
            );
            None
        }
    }
}

impl Opt {
    pub(crate) fn text(&self, form: &str, errors: &mut Errors) -> Option<Text> {
        match syn::parse2::<LitStr>(self.value.clone()) {
            Ok(literal) if !self.parenthesised => Some(Text {
                value: literal.value(),
                span: literal.span(),
            }),
            _ => {
                errors.on(
                    self.blamed(),
                    format!("`{}` takes a string: `{form}`", self.name),
                );
                None
            }
        }
    }

    /// The value, or where there is none, the name.
    fn blamed(&self) -> TokenStream {
        if self.value.is_empty() {
            self.name.to_token_stream()
        } else {
            self.value.clone()
        }
    }

    pub(crate) fn millis(&self, form: &str, errors: &mut Errors) -> Option<(u64, Span)> {
        let text = self.text(form, errors)?;
        let millis = millis(&text.value);
        if millis.is_none() {
            errors.at(
                text.span,
                format!("\"{}\" is no duration: write a whole number and a unit (`ms`, `s`, `m`, `h` or `d`), as in `{form}`", text.value),
            );
        }
        Some((millis?, text.span))
    }

    /// `backoff = "200ms..5s"`
    pub(crate) fn range(&self, form: &str, errors: &mut Errors) -> Option<(u64, u64, Span)> {
        let text = self.text(form, errors)?;
        let ends = text.value.split_once("..");
        let ends = ends.and_then(|(first, last)| Some((millis(first)?, millis(last)?)));
        if ends.is_none() {
            errors.at(
                text.span,
                format!("\"{}\" is no range of durations: write two of them, each a whole number and a unit (`ms`, `s`, `m`, `h` or `d`), as in `{form}`", text.value),
            );
        }
        let (first, last) = ends?;
        Some((first, last, text.span))
    }

    /// `retries = 3`
    pub(crate) fn retries(&self, errors: &mut Errors) -> Option<u32> {
        let number = match syn::parse2::<LitInt>(self.value.clone()) {
            Ok(number) if !self.parenthesised && number.suffix().is_empty() => number,
            _ => {
                errors.on(
                    self.blamed(),
                    "`retries` takes a whole number: `retries = 3`",
                );
                return None;
            }
        };
        let times = number.base10_parse().ok();
        let times = times.filter(|times| (1..=100).contains(times));
        if times.is_none() {
            errors.on(
                &number,
                format!("a phase is repeated 1 to 100 times, not {number}; without `retries` it is not repeated before the client is asked to retry"),
            );
        }
        times
    }

    /// `at_most_once`
    pub(crate) fn stands_alone(&self, errors: &mut Errors) -> bool {
        if !self.is_bare {
            errors.on(
                self.blamed(),
                format!(
                    "`{0}` takes no value: write `{0}` alone, or leave it out",
                    self.name
                ),
            );
        }
        true
    }

    /// `renamed_from(RideCreated = "ride_made")`
    pub(crate) fn renames(&self, errors: &mut Errors) -> Vec<Rename> {
        let rename = |input: ParseStream<'_>| {
            let point = input.parse()?;
            input.parse::<Token![=]>()?;
            let literal: LitStr = input.parse()?;
            let (value, span) = (literal.value(), literal.span());
            Ok(Rename {
                point,
                old: Text { value, span },
            })
        };
        let parser = |input: ParseStream<'_>| {
            Punctuated::<Rename, Token![,]>::parse_terminated_with(input, rename)
        };
        let renames = match parser.parse2(self.value.clone()) {
            Ok(renames) if self.parenthesised && !renames.is_empty() => renames,
            _ => {
                errors.on(
                    self.blamed(),
                    "`renamed_from` takes points of this arrow and the names under which older versions stored them: `renamed_from(RideCreated = \"ride_made\")`",
                );
                return Vec::new();
            }
        };
        let (stored, odd): (Vec<_>, Vec<_>) = renames
            .into_iter()
            .partition(|rename| is_stored_name(&rename.old.value));
        for Rename { old, .. } in odd {
            let snake = snake_case(&old.value);
            let meant = if is_stored_name(&snake) {
                format!("; it was stored as \"{snake}\"")
            } else {
                String::new()
            };
            errors.at(
                old.span,
                format!(
                    "no version stored a point as \"{}\": points are stored in snake_case{meant}",
                    old.value
                ),
            );
        }
        stored
    }

    pub(crate) fn points(&self, errors: &mut Errors) -> Vec<Ident> {
        let parser = Punctuated::<Ident, Token![,]>::parse_terminated;
        match parser.parse2(self.value.clone()) {
            Ok(points) if self.parenthesised && !points.is_empty() => points.into_iter().collect(),
            _ => {
                errors.on(
                    self.blamed(),
                    "`with` takes the points whose values the phase asks for: `with(RideCreated)`",
                );
                Vec::new()
            }
        }
    }

    pub(crate) fn isolation(&self, errors: &mut Errors) -> Option<Isolation> {
        const LEVELS: [&str; 3] = ["read committed", "repeatable read", "serializable"];
        let text = self.text("isolation = \"serializable\"", errors)?;
        match text.value.as_str() {
            "read committed" => Some(Isolation::ReadCommitted),
            "repeatable read" => Some(Isolation::RepeatableRead),
            "serializable" => Some(Isolation::Serializable),
            other => {
                errors.at(
                    text.span,
                    format!(
                        "unknown isolation level `{other}`{} (there are {})",
                        suggestion(other, LEVELS),
                        list(LEVELS)
                    ),
                );
                None
            }
        }
    }

    pub(crate) fn call_name(&self, errors: &mut Errors) -> Option<Text> {
        let text = self.text("key = \"charge\"", errors)?;
        if text.value.is_empty() || text.value.len() > 64 || text.value.contains(char::is_control) {
            errors.at(text.span, "`key` names the outside call, and its derived key is computed from it: 1 to 64 letters");
            return None;
        }
        Some(text)
    }

    pub(crate) fn eager(&self, errors: &mut Errors) -> bool {
        let Some(text) = self.text("checkpoint = \"eager\"", errors) else {
            return false;
        };
        if text.value != "eager" {
            errors.at(
                text.span,
                format!("unknown checkpoint `{}`; there is `eager` (the result is committed by itself), and without it the next phase's transaction stores the result", text.value),
            );
        }
        true
    }
}

fn is_stored_name(name: &str) -> bool {
    name.starts_with(char::is_alphabetic)
        && name.chars().all(|c| c.is_alphanumeric() || c == '_')
        && snake_case(name) == name
}
