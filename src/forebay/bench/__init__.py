"""`forebay bench`: what the link and the mover do on this machine, against floor and rivals."""
