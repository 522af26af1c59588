"""What every patcher of models needs: changes that are all made or none, and the report."""
