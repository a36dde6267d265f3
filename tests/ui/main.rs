//! What the compiler says about flows: each mistake in `fail` gives the reviewed message beside it,
//! and everything in `pass` compiles. See the README in this folder.

#[test]
fn ui() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("ui/fail/*.rs");
    cases.pass("ui/pass/*.rs");
}
