//! The examples do what they say.

use std::sync::Arc;

use tests::database::TestDatabase;

use crate::booking::{House, book};

#[tokio::test]
async fn the_booking_takes_either_branch_once() {
    let database = TestDatabase::empty().await;
    let house = Arc::new(House::with_rooms(vec![7]));
    let [first, retry, full] = book(database.pool(), Arc::clone(&house)).await.unwrap();

    assert_eq!(first.reply().body(), &br#""ada: room 7, 18000 cents""#[..]);
    assert!(retry.is_replayed());
    assert_eq!(retry.reply(), first.reply());
    assert_eq!(full.reply().body(), &br#""bert: no room is free""#[..]);
    assert_eq!(house.letters(), 2);
    let letters: i64 = sqlx::query_scalar("SELECT count(*) FROM letters")
        .fetch_one(&database.pool())
        .await
        .unwrap();
    assert_eq!(letters, 2);
}
