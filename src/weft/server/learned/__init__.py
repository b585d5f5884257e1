"""What the server keeps of its traffic: answers that may get feedback, and what engines learned."""
