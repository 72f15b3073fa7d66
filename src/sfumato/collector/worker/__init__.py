"""What the collector does by itself: seals, runs masked rounds, releases."""
