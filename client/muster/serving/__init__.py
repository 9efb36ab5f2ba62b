"""What every gRPC server of Muster shares: its options, and bounds on the memory that readers take."""
