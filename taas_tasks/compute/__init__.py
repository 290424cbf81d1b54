"""Jobs on hosts: one supervisor runs every job; a transport only starts it and reads its state."""
