"""Where does a training hang? Runs your unchanged script, and tells when and where all its ranks stand still."""
