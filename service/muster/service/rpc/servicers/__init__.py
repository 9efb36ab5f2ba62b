"""The gRPC services: each translates between messages and the driver."""
