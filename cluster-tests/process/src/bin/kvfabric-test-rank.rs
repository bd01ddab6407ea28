//! One rank or one directory of the process tests; see `kvfabric_process_tests::child`.
#![forbid(unsafe_code)]

fn main() {
    kvfabric_process_tests::child::main();
}
