"""`dustin serve`: an HTTP server that OpenAI clients work with, over one engine thread that batches with speculation."""
