"""Commands that change something: abort, close, evict, forget, save."""
