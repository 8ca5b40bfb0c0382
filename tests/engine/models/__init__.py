"""Models read from files, which the tests write."""
