//! Reads the impl block, and no more of it than is needed. A parser that must understand every body
//! fails while one is being typed, and an editor then loses its completions. So a body is one opaque
//! token, an unmarked item is not looked into at all, and what we give back is the user's own tokens
//! less our marks.
//!
//! Deliberately absent: what the marks say. That is [`attr`](crate::attr).

use proc_macro2::{Delimiter, Group, Ident, Spacing, Span, TokenStream, TokenTree};
use syn::parse::{Parse, ParseStream};
use syn::{Generics, Signature, Token, Type, Visibility};

use crate::errors::Errors;
use crate::text::{did_you_mean, list};

/// The attributes that are ours inside of the block.
pub(crate) const MARKS: [&str; 4] = ["atomic", "external", "on_reject", "reconcile"];

/// The user's impl block.
pub(crate) struct Block {
    /// The attributes of the block, as written.
    pub(crate) attributes: TokenStream,
    /// The block itself, as written, less our marks.
    pub(crate) rest: TokenStream,
    /// Its `#[cfg(..)]`: what is generated must come and go with the block.
    pub(crate) cfgs: TokenStream,
    pub(crate) generics: Generics,
    pub(crate) self_ty: Type,
    /// The name of the flow's type.
    pub(crate) ident: Ident,
    /// The fns that carry a mark.
    pub(crate) marked: Vec<Marked>,
    /// Some mark or marked fn could not be read; the graph is not all there.
    pub(crate) incomplete: bool,
}

/// A fn with at least one of our marks.
pub(crate) struct Marked {
    pub(crate) marks: Vec<Mark>,
    pub(crate) signature: Signature,
    /// A `#[cfg]` or `#[cfg_attr]` on the fn.
    pub(crate) cfg: Option<Span>,
}

/// One of our attributes: `#[atomic(Started -> RideCreated)]`.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) name: Ident,
    pub(crate) arguments: TokenStream,
}

/// Reads the block; nothing if it is not the impl block of a type.
pub(crate) fn block(tokens: TokenStream, errors: &mut Errors) -> Option<Block> {
    let (attributes, item) = split_attributes(tokens.into_iter().collect());
    let cfgs = attributes
        .iter()
        .filter(|attribute| attribute.is("cfg"))
        .flat_map(|attribute| attribute.tokens.clone())
        .collect();
    let attributes = attributes
        .into_iter()
        .flat_map(|attribute| attribute.tokens)
        .collect();
    let header = match syn::parse2::<Header>(item.iter().cloned().collect()) {
        Ok(header) => header,
        Err(error) => {
            errors.at(error.span(), error);
            return None;
        }
    };
    let Some(ident) = type_name(&header.self_ty) else {
        errors.on(&header.self_ty, "`#[idempotent_flow]` goes on the impl block of a struct or an enum: the flow takes its name");
        return None;
    };
    let (marked, incomplete) = marked(&items(header.body.stream()), errors);
    let rest = without_marks(item.into_iter().collect());
    Some(Block {
        attributes,
        rest,
        cfgs,
        generics: header.generics,
        self_ty: header.self_ty,
        ident,
        marked,
        incomplete,
    })
}

/// What we were put on, less our marks, which nobody else knows.
pub(crate) fn without_marks(item: TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = item.into_iter().collect();
    if let Some(TokenTree::Group(body)) = tokens
        .last_mut()
        .filter(|last| matches!(last, TokenTree::Group(_)))
    {
        let mut stripped = Group::new(
            body.delimiter(),
            items(body.stream())
                .iter()
                .flat_map(Item::without_marks)
                .collect(),
        );
        stripped.set_span(body.span());
        *body = stripped;
    }
    tokens.into_iter().collect()
}

/// `impl<P: Payments> RideFlow<P> where .. { .. }`
struct Header {
    generics: Generics,
    self_ty: Type,
    body: Group,
}

impl Parse for Header {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if !input.peek(Token![impl]) {
            let message = "`#[idempotent_flow]` goes on an impl block: the async fns in it are the phases of the flow";
            return Err(syn::Error::new(input.span(), message));
        }
        input.parse::<Token![impl]>()?;
        let mut generics: Generics = input.parse()?;
        let self_ty: Type = input.parse()?;
        if let Some(token) = input.parse::<Option<Token![for]>>()? {
            let message = "`#[idempotent_flow]` goes on an impl block of the flow's own type, not of a trait; it implements `Flow` itself";
            return Err(syn::Error::new(token.span, message));
        }
        generics.where_clause = input.parse()?;
        match input.parse()? {
            TokenTree::Group(body) if body.delimiter() == Delimiter::Brace => Ok(Self {
                generics,
                self_ty,
                body,
            }),
            other => Err(syn::Error::new(
                other.span(),
                "expected the braces of the impl block",
            )),
        }
    }
}

fn type_name(ty: &Type) -> Option<Ident> {
    match ty {
        Type::Path(path) if path.qself.is_none() => path
            .path
            .segments
            .last()
            .map(|segment| segment.ident.clone()),
        Type::Group(group) => type_name(&group.elem),
        Type::Paren(paren) => type_name(&paren.elem),
        _ => None,
    }
}

/// `#[..]`, with the tokens it consists of.
#[derive(Debug, Clone)]
struct Attribute {
    tokens: [TokenTree; 2],
    content: TokenStream,
}

impl Attribute {
    /// The name, if it is a single word.
    fn name(&self) -> Option<Ident> {
        let mut content = self.content.clone().into_iter();
        match (content.next(), content.next()) {
            (Some(TokenTree::Ident(name)), None | Some(TokenTree::Group(_))) => Some(name),
            (Some(TokenTree::Ident(name)), Some(TokenTree::Punct(punct)))
                if punct.as_char() == '=' =>
            {
                Some(name)
            }
            _ => None,
        }
    }

    fn is(&self, name: &str) -> bool {
        self.name().is_some_and(|own| own == name)
    }

    fn arguments(&self) -> TokenStream {
        match self.content.clone().into_iter().nth(1) {
            Some(TokenTree::Group(group)) => group.stream(),
            _ => TokenStream::new(),
        }
    }

    /// Ours, or meant to be ours.
    fn mark(&self) -> Option<Mark> {
        let name = self.name()?;
        let arguments = self.arguments();
        let ours = MARKS.iter().any(|mark| name == mark);
        let meant = || has_arrow(&arguments) || did_you_mean(&name.to_string(), MARKS).is_some();
        (ours || meant()).then_some(Mark { name, arguments })
    }
}

fn has_arrow(tokens: &TokenStream) -> bool {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    tokens.windows(2).any(|pair| match pair {
        [TokenTree::Punct(dash), TokenTree::Punct(head)] => {
            dash.as_char() == '-' && dash.spacing() == Spacing::Joint && head.as_char() == '>'
        }
        _ => false,
    })
}

fn split_attributes(tokens: Vec<TokenTree>) -> (Vec<Attribute>, Vec<TokenTree>) {
    let mut attributes = Vec::new();
    let mut rest = tokens.as_slice();
    while let [TokenTree::Punct(hash), TokenTree::Group(group), after @ ..] = rest {
        if hash.as_char() != '#' || group.delimiter() != Delimiter::Bracket {
            break;
        }
        attributes.push(Attribute {
            tokens: [rest[0].clone(), rest[1].clone()],
            content: group.stream(),
        });
        rest = after;
    }
    (attributes, rest.to_vec())
}

/// One item of the block, cut out of it token by token.
#[derive(Debug)]
struct Item {
    attributes: Vec<Attribute>,
    /// Everything after the attributes; of a fn, the last token is its body.
    tokens: Vec<TokenTree>,
}

impl Item {
    fn without_marks(&self) -> impl Iterator<Item = TokenTree> {
        let kept = self
            .attributes
            .iter()
            .filter(|attribute| attribute.mark().is_none());
        kept.flat_map(|attribute| attribute.tokens.clone())
            .chain(self.tokens.clone())
    }
}

/// Cuts the content of the block into items. It never fails: what it cannot make out becomes part of
/// some item, and is given back as it was.
fn items(body: TokenStream) -> Vec<Item> {
    let mut rest: Vec<TokenTree> = body.into_iter().collect();
    let mut items = Vec::new();
    while !rest.is_empty() {
        let (attributes, mut tokens) = split_attributes(rest);
        rest = tokens.split_off(item_length(&tokens));
        items.push(Item { attributes, tokens });
    }
    items
}

fn item_length(tokens: &[TokenTree]) -> usize {
    let is_fn = tokens
        .iter()
        .take_while(|token| !matches!(token, TokenTree::Punct(punct) if matches!(punct.as_char(), '=' | ':' | ';' | '!')))
        .any(|token| matches!(token, TokenTree::Ident(ident) if ident == "fn"));
    let mut assigned = false;
    for (index, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == ';' => return index + 1,
            // `const LIMIT: u32 = { 3 };` goes on behind its braces; so does `fn f() -> Array<{ N }>`.
            TokenTree::Punct(punct) if punct.as_char() == '=' && !is_fn => assigned = true,
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace && !assigned => {
                let inside_generics = matches!(tokens.get(index + 1), Some(TokenTree::Punct(punct)) if matches!(punct.as_char(), '>' | ','));
                if !inside_generics {
                    return index + 1;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

fn marked(items: &[Item], errors: &mut Errors) -> (Vec<Marked>, bool) {
    let mut incomplete = false;
    let mut marked = Vec::new();
    for item in items {
        let marks: Vec<Mark> = item.attributes.iter().filter_map(Attribute::mark).collect();
        let Some(first) = marks.first() else { continue };
        let is_known = |mark: &Mark| MARKS.iter().any(|known| mark.name == known);
        for mark in marks.iter().filter(|mark| !is_known(mark)) {
            incomplete = true;
            let meant = did_you_mean(&mark.name.to_string(), MARKS).map_or(String::new(), |name| {
                format!("; did you mean `#[{name}(..)]`?")
            });
            errors.on(
                &mark.name,
                format!(
                    "there is no `#[{}]` in a flow{meant} (a fn may be marked {})",
                    mark.name,
                    list(MARKS)
                ),
            );
        }
        if !marks.iter().any(is_known) {
            continue;
        }
        let cfg = item
            .attributes
            .iter()
            .filter(|attribute| attribute.is("cfg") || attribute.is("cfg_attr"))
            .find_map(|attribute| attribute.name().map(|name| name.span()));
        let head = item
            .tokens
            .iter()
            .take(item.tokens.len().saturating_sub(1))
            .cloned()
            .collect();
        match syn::parse2::<Head>(head) {
            Ok(head) => {
                let marks = marks.into_iter().filter(is_known).collect();
                marked.push(Marked {
                    marks,
                    signature: head.signature,
                    cfg,
                });
            }
            Err(error) => {
                incomplete = true;
                errors.at(
                    error.span(),
                    format!("`#[{}]` marks an async fn of the flow: {error}", first.name),
                );
            }
        }
    }
    (marked, incomplete)
}

/// A fn without its body.
struct Head {
    signature: Signature,
}

impl Parse for Head {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        input.parse::<Visibility>()?;
        Ok(Self {
            signature: input.parse()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quote::quote;

    fn read(tokens: TokenStream) -> (Option<Block>, Vec<String>) {
        let mut errors = Errors::new();
        let block = block(tokens, &mut errors);
        let found = errors
            .finish()
            .err()
            .unwrap_or_default()
            .iter()
            .map(ToString::to_string)
            .collect();
        (block, found)
    }

    #[test]
    fn the_block_comes_back_without_our_marks_and_otherwise_untouched() {
        let (block, errors) = read(quote! {
            /// Rides.
            #[cfg(feature = "rides")]
            impl<P: Payments> RideFlow<P> where P: Clone {
                const LIMIT: u32 = { 3 };
                /// Creates.
                #[atomic(Started -> Finished)]
                #[inline]
                pub async fn create(&self) -> Result<Array<{ 3 }>, E> { anything goes +++ here; }
                helper!(async fn inside());
                fn helper(&self) -> impl Iterator<Item = u8> { #[atomic(not ours)] { } }
            }
        });
        let block = block.unwrap();
        assert_eq!(errors, [""; 0]);
        assert_eq!(block.ident, "RideFlow");
        assert_eq!(
            block.cfgs.to_string(),
            quote!(#[cfg(feature = "rides")]).to_string()
        );
        assert_eq!(
            block.rest.to_string(),
            quote! {
                impl<P: Payments> RideFlow<P> where P: Clone {
                    const LIMIT: u32 = { 3 };
                    /// Creates.
                    #[inline]
                    pub async fn create(&self) -> Result<Array<{ 3 }>, E> { anything goes +++ here; }
                    helper!(async fn inside());
                    fn helper(&self) -> impl Iterator<Item = u8> { #[atomic(not ours)] { } }
                }
            }
            .to_string()
        );
        let names: Vec<String> = block
            .marked
            .iter()
            .map(|marked| marked.signature.ident.to_string())
            .collect();
        assert_eq!(names, ["create"]);
        assert_eq!(
            block.marked[0].marks[0].arguments.to_string(),
            quote!(Started -> Finished).to_string()
        );
    }

    #[test]
    fn other_items_are_refused() {
        let (block, errors) = read(quote!(
            struct RideFlow;
        ));
        assert!(block.is_none());
        assert_eq!(
            errors,
            [
                "`#[idempotent_flow]` goes on an impl block: the async fns in it are the phases of the flow"
            ]
        );
        let (block, errors) = read(quote!(impl Flow for RideFlow {}));
        assert!(block.is_none());
        assert!(errors[0].contains("not of a trait"), "{errors:?}");
    }

    #[test]
    fn a_misspelt_mark_is_taken_out_and_named() {
        let (block, errors) = read(quote! {
            impl RideFlow {
                #[atomc(Started -> Finished)]
                async fn create(&self) {}
            }
        });
        let block = block.unwrap();
        assert!(block.incomplete);
        assert!(!block.rest.to_string().contains("atomc"));
        assert_eq!(
            errors,
            [
                "there is no `#[atomc]` in a flow; did you mean `#[atomic(..)]`? (a fn may be marked `atomic`, `external`, `on_reject` and `reconcile`)"
            ]
        );
    }
}
