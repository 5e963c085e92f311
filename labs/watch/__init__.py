"""Where does a training run hang? Runs your unchanged script, and reports when and where all its ranks stop moving."""
