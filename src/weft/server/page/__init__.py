"""The page at `/`: a chat and the live view, in HTML, CSS and JavaScript modules without a build and without libraries."""
