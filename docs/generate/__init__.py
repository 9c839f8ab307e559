"""Programs that write the tables and pictures of docs/."""
