"""What `kvtool doctor` looks at: the installation, the machine, the model, the store."""
