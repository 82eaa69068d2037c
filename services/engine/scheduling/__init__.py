"""What runs next: queue, scheduler, block tables, and the engine's loop."""
