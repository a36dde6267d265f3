//! The side of the proxy that accepts connections, and the one place where all of them can be cut.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::ledger::Shared;
use super::relay;

/// What a test asks for, and whom to tell when it is so.
pub(super) type Order = (Command, oneshot::Sender<()>);

/// What a test asks of the accepting side.
#[derive(Clone, Copy)]
pub(super) enum Command {
    Cut,
    Refuse,
    Accept,
}

/// Accepts until the proxy is dropped.
pub(super) async fn serve(
    listener: std::net::TcpListener,
    shared: Arc<Shared>,
    mut commands: mpsc::UnboundedReceiver<Order>,
) {
    let mut reserved = None;
    let mut listener = Some(TcpListener::from_std(listener).expect("a listener that tokio takes"));
    let mut connections = JoinSet::new();
    let mut next = 0;
    loop {
        tokio::select! {
            accepted = accept(listener.as_ref()) => if let Ok((client, _)) = accepted {
                connections.spawn(relay::run(client, next, Arc::clone(&shared)));
                next += 1;
            },
            Some(_) = connections.join_next() => {}
            command = commands.recv() => {
                let Some((command, done)) = command else { return };
                match command {
                    Command::Cut => {}
                    // Bound but not listening, the port stays ours and connections to it are
                    // refused.
                    Command::Refuse => if let Some(open) = listener.take() {
                        reserved = Some(close(open));
                    },
                    Command::Accept => if let Some(port) = reserved.take() {
                        listener = Some(port.listen(128).expect("a bound socket listens"));
                    },
                }
                if !matches!(command, Command::Accept) {
                    connections.shutdown().await;
                }
                let _ = done.send(());
            }
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<(TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => pending().await,
    }
}

/// Closes a listener and keeps its port.
fn close(listener: TcpListener) -> TcpSocket {
    let address = listener.local_addr().expect("a listener has an address");
    drop(listener);
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .set_reuseaddr(true)
        .expect("the address can be reused");
    socket.bind(address).expect("the port is still free");
    socket
}
