//! Cuts the PostgreSQL protocol, version 3, into messages.
//!
//! Only the framing is understood here, and the few fields that the proxy counts or matches on. No
//! message is changed, and none is passed on before it is complete, so that a fault can never split
//! one.

use std::time::Instant;

use tokio::io::{AsyncRead, AsyncReadExt};

/// How many bytes are asked for at once.
const CHUNK: usize = 16 * 1024;

/// The bytes before a startup packet's parameters: its length and its code.
const STARTUP_HEADER: usize = 8;

/// What a connection's first packet asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Startup {
    /// TLS or GSSAPI encryption, which the proxy declines: it wants to read along.
    Encryption,
    /// A session, or that another session's statement is cancelled: for the server.
    Server(Vec<u8>),
}

/// One typed message, header included.
pub(super) struct Message {
    /// The message as it travels.
    pub(super) bytes: Vec<u8>,
}

impl Message {
    /// The letter that says what the message is.
    pub(super) fn kind(&self) -> u8 {
        self.bytes[0]
    }

    /// What follows the letter and the length.
    pub(super) fn body(&self) -> &[u8] {
        &self.bytes[5..]
    }

    /// An ErrorResponse's SQLSTATE.
    pub(super) fn sqlstate(&self) -> Option<String> {
        let mut fields = self.body();
        while let Some((&code, rest)) = fields.split_first().filter(|(code, _)| **code != 0) {
            let (value, rest) = text(rest);
            if code == b'C' {
                return Some(value);
            }
            fields = rest;
        }
        None
    }
}

/// The text up to the next NUL, and what follows it.
pub(super) fn text(bytes: &[u8]) -> (String, &[u8]) {
    let end = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    let rest = bytes.get(end + 1..).unwrap_or_default();
    (String::from_utf8_lossy(&bytes[..end]).into_owned(), rest)
}

/// The FATAL answer of a server that cannot take a connection yet.
pub(super) fn cannot_connect_now() -> Vec<u8> {
    let fields = b"SFATAL\0VFATAL\0C57P03\0Mthe server behind the proxy is not up\0\0";
    let length = u32::try_from(fields.len() + 4).unwrap();
    [b"E".as_slice(), &length.to_be_bytes(), fields].concat()
}

/// One direction of a connection as messages. `None` means that the peer is gone, however it went.
pub(super) struct Frames<R> {
    reader: R,
    buffer: Vec<u8>,
    arrived: Instant,
}

impl<R: AsyncRead + Unpin> Frames<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            buffer: Vec::new(),
            arrived: Instant::now(),
        }
    }

    /// The next message. Safe to cancel: a message is taken out of the buffer as a whole or not at
    /// all.
    pub(super) async fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(length) = self.buffered()? {
                let bytes = self.buffer.drain(..length).collect();
                return Some(Message { bytes });
            }
            self.fill().await?;
        }
    }

    /// A connection's first packet, which has no letter.
    pub(super) async fn startup(&mut self) -> Option<Startup> {
        while self.buffer.len() < STARTUP_HEADER {
            self.fill().await?;
        }
        let length = usize::try_from(number(&self.buffer)).ok()?;
        let code = number(&self.buffer[4..]);
        if length < STARTUP_HEADER {
            return None;
        }
        while self.buffer.len() < length {
            self.fill().await?;
        }
        let packet: Vec<u8> = self.buffer.drain(..length).collect();
        Some(match code {
            80_877_103 | 80_877_104 => Startup::Encryption,
            _ => Startup::Server(packet),
        })
    }

    /// Whether a whole message has already been read.
    pub(super) fn has_next(&self) -> bool {
        matches!(self.buffered(), Some(Some(_)))
    }

    /// When the last bytes arrived. What was sent in one write, pipelined, mostly shares its time.
    pub(super) fn arrived(&self) -> Instant {
        self.arrived
    }

    /// The length of the first message if it is complete; the outer `None` is for a peer that does
    /// not speak the protocol.
    fn buffered(&self) -> Option<Option<usize>> {
        let Some(header) = self.buffer.get(1..5) else {
            return Some(None);
        };
        let length = usize::try_from(number(header)).ok()?;
        if length < 4 {
            return None;
        }
        Some((self.buffer.len() > length).then_some(length + 1))
    }

    async fn fill(&mut self) -> Option<()> {
        self.buffer.reserve(CHUNK);
        let read = self.reader.read_buf(&mut self.buffer).await.ok()?;
        self.arrived = Instant::now();
        (read > 0).then_some(())
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).unwrap();
        [&[kind], length.to_be_bytes().as_slice(), body].concat()
    }

    #[tokio::test]
    async fn messages_are_whole_however_they_arrive() {
        let (mut peer, reader) = tokio::io::duplex(3);
        let large = vec![b'x'; 3 * CHUNK];
        let sent = [
            message(b'Q', b"SELECT 1\0"),
            message(b'd', &large),
            message(b'S', b""),
        ]
        .concat();
        let sending = tokio::spawn(async move { peer.write_all(&sent).await });

        let mut frames = Frames::new(reader);
        let query = frames.next().await.unwrap();
        assert_eq!(
            (query.kind(), query.body()),
            (b'Q', b"SELECT 1\0".as_slice())
        );
        assert_eq!(frames.next().await.unwrap().body(), large);
        assert_eq!(frames.next().await.unwrap().bytes, message(b'S', b""));
        assert!(frames.next().await.is_none());
        sending.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn half_a_message_is_no_message() {
        let commit = message(b'Q', b"COMMIT\0");
        let mut frames = Frames::new(&commit[..9]);
        assert!(frames.next().await.is_none());
        let mut frames = Frames::new(b"GET / HTTP/1.1\r\n\r\n".as_slice());
        assert!(frames.next().await.is_none());
    }

    #[tokio::test]
    async fn the_first_packet_is_told_apart() {
        let packet = |code: u32, body: &[u8]| {
            let length = u32::try_from(body.len() + 8).unwrap();
            [length.to_be_bytes().as_slice(), &code.to_be_bytes(), body].concat()
        };
        let session = packet(196_608, b"user\0me\0\0");
        let sent = [
            packet(80_877_103, b""),
            packet(80_877_104, b""),
            session.clone(),
        ]
        .concat();
        let mut frames = Frames::new(sent.as_slice());
        assert_eq!(frames.startup().await, Some(Startup::Encryption));
        assert_eq!(frames.startup().await, Some(Startup::Encryption));
        assert_eq!(frames.startup().await, Some(Startup::Server(session)));
    }

    #[test]
    fn an_error_tells_its_sqlstate() {
        let bytes = cannot_connect_now();
        assert_eq!(Message { bytes }.sqlstate().as_deref(), Some("57P03"));
    }
}
