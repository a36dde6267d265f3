//! A client of HTTP/1.1 that sends just the bytes it is given: for headers that no decent client
//! would send, requests that come in pieces, and connections that break off.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Nothing that is read takes longer, unless it never comes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    /// What was read behind the last response.
    read: Vec<u8>,
}

/// A response as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// The status.
    pub status: u16,
    /// The headers in their order, with names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Response {
    /// The first header of this name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        let found = headers.find(|(header, _)| header == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A request with a body of a known length. Each header is a line without its end.
#[must_use]
pub fn post(path: &str, headers: &[&[u8]], body: &[u8]) -> Vec<u8> {
    let mut request = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n").into_bytes();
    for header in headers {
        request.extend_from_slice(header);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
    request.extend_from_slice(body);
    request
}

impl Connection {
    /// Connects to `http://127.0.0.1:port`.
    ///
    /// # Panics
    ///
    /// When nobody listens there.
    pub async fn open(base: &str) -> Self {
        let address = base.trim_start_matches("http://");
        let stream = TcpStream::connect(address).await.expect("it listens");
        Self {
            stream,
            read: Vec::new(),
        }
    }

    /// Sends these bytes.
    ///
    /// # Errors
    ///
    /// When the server has closed the connection.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }

    /// Sends a request and reads its response.
    ///
    /// # Panics
    ///
    /// When none comes.
    pub async fn ask(&mut self, request: &[u8]) -> Response {
        self.send(request).await.expect("the server reads");
        self.response().await
    }

    /// Reads one response.
    ///
    /// # Panics
    ///
    /// When none comes, or what comes is none.
    pub async fn response(&mut self) -> Response {
        let head = loop {
            if let Some(end) = find(&self.read, b"\r\n\r\n") {
                let head = self.read.drain(..end + 4).collect::<Vec<_>>();
                // An interim answer (100 Continue) is followed by the real one.
                if !head.starts_with(b"HTTP/1.1 1") {
                    break String::from_utf8(head).expect("a head is ASCII");
                }
                continue;
            }
            assert!(
                self.more().await > 0,
                "the connection ended in a head: {:?}",
                self.read
            );
        };
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1));
        let status = status.and_then(|status| status.parse().ok());
        let headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let mut response = Response {
            status: status.unwrap_or_else(|| panic!("not a response: {head}")),
            headers,
            body: Vec::new(),
        };
        response.body = match response.header("content-length") {
            Some(length) => {
                let length = length.parse().expect("a length is a number");
                self.take(length).await
            }
            None if response.header("transfer-encoding").is_some() => self.chunks().await,
            None => Vec::new(),
        };
        response
    }

    /// Whether the server closes the connection, and sends nothing before it does.
    pub async fn is_closed(&mut self) -> bool {
        self.read.is_empty() && self.more().await == 0
    }

    async fn chunks(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let end = loop {
                if let Some(end) = find(&self.read, b"\r\n") {
                    break end;
                }
                assert!(self.more().await > 0, "the connection ended between chunks");
            };
            let line = self.take(end + 2).await;
            let length = String::from_utf8_lossy(&line);
            let length = usize::from_str_radix(length.trim(), 16).expect("a chunk has a length");
            let chunk = self.take(length + 2).await;
            if length == 0 {
                return body;
            }
            body.extend_from_slice(&chunk[..length]);
        }
    }

    async fn take(&mut self, length: usize) -> Vec<u8> {
        while self.read.len() < length {
            assert!(self.more().await > 0, "the connection ended in a body");
        }
        self.read.drain(..length).collect()
    }

    /// How many bytes came; 0 at the end of the connection, also of one that was reset.
    async fn more(&mut self) -> usize {
        let read = timeout(PATIENCE, self.stream.read_buf(&mut self.read)).await;
        read.expect("the server answers").unwrap_or(0)
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes
        .windows(wanted.len())
        .position(|window| window == wanted)
}
