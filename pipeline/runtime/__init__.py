"""What processes need beside the stages: leases, sweeping, clients, presence."""
