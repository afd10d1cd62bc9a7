"""Which bytes are which expert's weight: locate, read and decode."""
