"""Who is a member: seats, epochs, leases, placement; and both sides' connection to it."""
