"""Our own verify engine. It knows nothing of Celery, SQL or text: token ids in and out."""
