"""The pipeline itself: engine, policy, ingest, ledger, observe, and the stages that join them."""
