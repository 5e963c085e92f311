"""What each notebook shows: its figures, claims, exercises with their checks, and solutions."""
