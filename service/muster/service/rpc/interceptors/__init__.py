"""What happens around every call: access, audit, refusals and bounds."""
