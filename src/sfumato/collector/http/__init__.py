"""What the collector answers over HTTP."""
