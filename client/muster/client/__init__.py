"""The way to the coordinator, for the SDK and the relay: whom to call, what to show, how to read failures."""
