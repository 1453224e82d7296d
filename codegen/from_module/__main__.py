from codegen.from_module.command import main

main()
