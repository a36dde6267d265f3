//! One option of an attribute at a time: `lease = "15s"`, `with(RideCreated)`, `at_once`. The tokens are
//! split at commas before any option is looked at, so that one that cannot be read does not hide the
//! mistakes in the others.
//!
//! Deliberately absent: which options there are. That is [`attr`](crate::attr).

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::ToTokens;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::{LitStr, Token};

use crate::attr::Isolation;
use crate::errors::Errors;
use crate::text::{Text, list, millis, suggestion};

/// The options seen so far, to find those given twice.
#[derive(Default)]
pub(crate) struct Seen(Vec<String>);

impl Seen {
    pub(crate) fn twice(&mut self, name: &Ident, errors: &mut Errors) -> bool {
        let written = name.to_string();
        let twice = self.0.contains(&written);
        if twice {
            errors.on(name, format!("`{written}` is given twice"));
        }
        self.0.push(written);
        twice
    }
}

/// `lease = "15s"`, `with(RideCreated)`
pub(crate) struct Opt {
    pub(crate) name: Ident,
    value: TokenStream,
    parenthesised: bool,
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
        }),
        (Some(TokenTree::Ident(name)), Some(TokenTree::Punct(equals)))
            if equals.as_char() == '=' =>
        {
            Some(Opt {
                name,
                value: tokens.collect(),
                parenthesised: false,
            })
        }
        (Some(TokenTree::Ident(name)), Some(TokenTree::Group(group)))
            if tokens.next().is_none() =>
        {
            Some(Opt {
                name,
                value: group.stream(),
                parenthesised: true,
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
