from spangraph.cli import main

main(prog_name="spangraph")
