//! The l7rp program.
#[global_allocator]
static G: mimalloc::MiMalloc = mimalloc::MiMalloc;
fn main() -> std::process::ExitCode {
    let path = std::env::args().nth(2).unwrap_or_default();
    match l7rp::config::load(std::path::Path::new(&path), l7rp::config::Files::Check) {
        Ok(loaded) => l7rp::lifecycle::serve(loaded.plan, l7rp::observe::event::Level::Info),
        Err(e) => {
            eprintln!("{}", e.render(false));
            std::process::ExitCode::from(2)
        }
    }
}
