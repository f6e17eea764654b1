"""What the keys of other trainers are here: one table, for messages of the parser, `meshlora import` and its page."""
