"""What notebook 12 shows: the doctor, its trial, and a slow script to cure."""
