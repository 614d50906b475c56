"""tiers: where snapshots are kept outside of the device."""
