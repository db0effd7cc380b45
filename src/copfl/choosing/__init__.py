"""What is tried for which data, what is chosen by the losses of rows that were held out, and what that gains."""
