"""What a run leaves on disk, placed by global names and boxes: free of any layout."""
