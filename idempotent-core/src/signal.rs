//! A flag that others wait for.

use tokio::sync::watch;

/// Resolves when the flag is raised. Never, when it is not raised and nobody is left who could.
pub(crate) async fn raised(flag: &watch::Receiver<bool>) {
    let mut flag = flag.clone();
    if flag.wait_for(|raised| *raised).await.is_err() {
        std::future::pending().await
    }
}
