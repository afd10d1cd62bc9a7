"""Bytes in and out: headers, lazy reads, streamed writes."""
