"""What tests share: private servers and tiny models. Import as `support.<module>`."""
