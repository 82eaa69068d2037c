"""Who holds pages: sessions, the processes behind them, and the quarantine of lost ones."""
